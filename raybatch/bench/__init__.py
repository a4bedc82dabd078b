"""What a device does with this software: checked, measured, and written down to be sent in."""
