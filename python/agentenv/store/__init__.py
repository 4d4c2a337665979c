"""takes bytes and records from all, gives them back after any crash: blobs (directory) and records (SQL).
"""
