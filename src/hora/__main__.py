"""`python -m hora` is the command `hora`."""

from hora.cli import main

raise SystemExit(main())
