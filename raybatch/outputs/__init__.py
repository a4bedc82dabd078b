"""Operations on the output of a job: verify, order, retry failed rows, clean up."""
