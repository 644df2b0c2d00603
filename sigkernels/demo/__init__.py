"""The demo: three output layers on real data, and what each of them can never predict."""
