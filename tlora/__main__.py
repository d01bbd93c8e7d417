"""`python -m tlora` is `tlora`."""

from tlora.cli import main

main()
