"""Trackers: other programs that show runs. A file for each; its library is imported when it is used."""
