"""A device that is a table of step times, with exact pages. Free of torch."""
