"""``python -m proxy`` is ``sluicegate``."""

from proxy.cli import main

main()
