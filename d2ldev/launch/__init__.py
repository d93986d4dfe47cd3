"""``d2ldev launch``: one program on several processes and machines."""
