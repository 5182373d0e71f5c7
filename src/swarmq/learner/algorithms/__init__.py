"""The mathematics: pure functions in small registries. A new one is a function and a row."""
