"""Pure decisions over plain data: costs, memory, modes, lengths; no Ray, torch or clock."""
