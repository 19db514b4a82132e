"""`python -m service` is `bidgate`."""

from service.cli import main

main()
