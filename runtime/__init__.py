"""What a user holds at run time: caches and the merge laws."""
