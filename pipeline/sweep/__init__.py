"""Many runs of one recipe with other values and seeds, and what their figures show."""
