"""`python -m tlora` is `tlora`, also from a checkout that is not installed.

Everything is left to `tlora.cli`.
"""

from tlora.cli import main

main()
