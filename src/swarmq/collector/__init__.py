"""Joins begins, turns and ends into finished episodes, forms groups, issues tickets, and forgets nothing."""
