"""What works on this machine: `hflow doctor`."""
