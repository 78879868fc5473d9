from pipeline.plan.__main__ import main
from pipeline.run_dir.failures import exit_with_status

if __name__ == "__main__":
    exit_with_status(main)
