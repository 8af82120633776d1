"""`python -m reprieve`."""

from reprieve.cli import main

main()
