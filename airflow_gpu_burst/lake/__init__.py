"""
Iceberg: pinned snapshots, reading at a pin, appending exactly once. No Airflow in here.

`catalog` is the only module that opens a catalog and the only one that knows how its errors are called;
everything a REST and a SQL catalog differ in is a matter of properties.
"""
