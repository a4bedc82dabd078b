"""What crosses between the processes of a pool: records, and columns of rows."""
