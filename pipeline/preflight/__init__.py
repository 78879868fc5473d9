"""Before step 1: the plan, the checks, and the opening of the run and its rows."""
