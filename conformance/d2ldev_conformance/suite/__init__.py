"""The requirements, one folder for each room of the contract."""
