"""Work given to other processes and machines, through a scheduler of Dask's `distributed`.

Nothing here knows what the work is. A `Farm` hands out items of a job; a worker opens the job once and does
item after item. Only connect.py, scheduler.py and worker.py import `distributed`, and only when used.
"""
