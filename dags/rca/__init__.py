"""
Root cause analysis of low-yield lots: the pure part of the example DAG `yield_rca`.

    wafers       what a wafer table must look like; its factors (tools, chambers) and sensors
    synthetic    a made-up fab with a planted cause, to try the rest on
    lots         wafers -> lots: yield, which lots are bad, which went through a factor
    commonality  which tool or chamber do the bad lots have in common?
    features     wafers -> model matrix
    model        gradient boosting that can stop and go on; SHAP contributions
    variance     how much of a spread is lot, wafer and site (REML)
    findings     commonality and model in one ranked table
    svg, plots, wording, style, report   one self-contained HTML file

No Airflow in here and no I/O: the DAG reads the pinned table, the trainer runs on the GPU, both call these
functions. The single exception is `variance.oxide()`, which reads a data set from an installed package.
"""
