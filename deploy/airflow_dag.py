"""A DAG for Airflow 3: each day's prompts are answered on a Ray cluster, and the output is proved.

Put it into the folder of DAGs. Workers need raybatch, raybatch-submit and
RAY_API_SERVER_ADDRESS. A retry is the same command, which goes on where the job was.
"""

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

JOB_FILE = "/opt/jobs/job.yaml"
PROMPTS, ANSWERS = "s3://bucket/prompts/{{ ds }}", "s3://bucket/answers/{{ ds }}"

with DAG(
    dag_id="raybatch",
    schedule="@daily",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    # days share the GPUs of the cluster
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=5)},
):
    answer = BashOperator(
        task_id="answer",
        bash_command=(
            f"raybatch submit {JOB_FILE} --input {PROMPTS} --output {ANSWERS} --allow-error-rows"
        ),
    )
    verify = BashOperator(task_id="verify", bash_command=f"raybatch verify {ANSWERS}")
    answer >> verify
