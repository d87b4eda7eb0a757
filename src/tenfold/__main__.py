"""`python -m tenfold`, and so `torchrun -m tenfold`."""

from tenfold.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
