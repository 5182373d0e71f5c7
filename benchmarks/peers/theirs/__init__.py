"""Modules that run in verl's or TRL's environment only, and import what it has."""
