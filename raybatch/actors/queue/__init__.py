"""Who gets which rows: decisions of a pool over plain records. No Ray, no clock."""
