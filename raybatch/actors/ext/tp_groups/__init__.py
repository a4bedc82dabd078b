"""TP groups: idle engines join every step of the last rows (mechanism B6)."""
