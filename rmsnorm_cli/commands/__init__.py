"""One module per command; each has one public function that returns an Outcome."""
