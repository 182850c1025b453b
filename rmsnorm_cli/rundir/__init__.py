"""Run directories: made, written whole, listed, owned by a live process, ended by a signal."""
