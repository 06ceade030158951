"""One copy of the base weights for a server and a trainer on one device."""
