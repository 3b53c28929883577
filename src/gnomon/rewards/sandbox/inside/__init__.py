"""What runs on the far side: a fresh process that walls itself in and then becomes the program.

Started with `python -s -S -P`, nothing here imports anything outside the standard library and this folder. Imports
are relative, since `gnomon` is not on that interpreter's path and takes longer to import than a program to start.
"""
