"""The labs as commands: `hora demo penguins`, `hora demo images`."""
