"""Running a program that a model wrote so that it cannot do harm: run.py starts it, child.py is what it runs in."""
