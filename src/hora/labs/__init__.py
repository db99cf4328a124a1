"""Labs, run as commands: `hora demo penguins`, `hora demo images`, `hora demo faults`."""
