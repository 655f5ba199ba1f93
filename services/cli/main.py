"""`kvmesh`: what the process hears is set up before anything is imported that takes time."""

from services.ending import end_when_told


def main() -> None:
    """Run the command."""
    end_when_told()
    from services.cli.app import run

    run()


if __name__ == "__main__":
    main()
