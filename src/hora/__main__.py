"""`python -m hora` runs the command `hora`."""

from hora.cli import main

raise SystemExit(main())
