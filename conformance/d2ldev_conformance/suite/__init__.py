"""The requirements, one folder for each area of the contract."""
