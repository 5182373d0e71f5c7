"""Stored episodes: read from the batch log (`read`), drawn in a terminal (`terminal`) or as a page (`html`)."""
