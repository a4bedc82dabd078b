from gpu_call.stage import run_stage
if __name__ == "__main__":
    run_stage("bench", lambda stage: stage.figure("stub"))
