"""`python -m rmsnorm_cli`: the same command line, for torchrun and for machines without the script on the path."""

from rmsnorm_cli.cli import main

if __name__ == "__main__":
    main()
