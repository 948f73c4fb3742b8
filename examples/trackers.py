"""Follow a training in MLflow or in W&B: any object with start, log and finish is a tracker.

pip install '.[trackers]'
python examples/trackers.py mlflow        (then: mlflow ui --backend-store-uri sqlite:///runs.db)
WANDB_MODE=offline python examples/trackers.py wandb
tagi-ddp run -n 2 examples/trackers.py mlflow        (rank 0 alone calls the tracker)
"""

import sys

import pytagi
from pytagi.nn import Linear, ReLU, Sequential
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale

from tagi_ddp.parallel import GaussianLoss, ParallelMixin, Task

NOISE = 0.5  # variance of what the inputs do not tell, in units of the target's deviation


class MLflow:
    """Runs of MLflow in a file of sqlite."""

    def __init__(self, uri="sqlite:///runs.db"):
        self.uri = uri

    def start(self, name, settings):
        import mlflow

        mlflow.set_tracking_uri(self.uri)
        mlflow.set_experiment("tagi_ddp")
        mlflow.start_run(run_name=name)
        mlflow.log_params(settings)

    def log(self, metrics, step):
        import mlflow

        mlflow.log_metrics(metrics, step=step)

    def finish(self, failed):
        import mlflow

        mlflow.end_run("FAILED" if failed else "FINISHED")


class Wandb:
    """Runs of W&B; with WANDB_MODE=offline in the folder wandb."""

    def start(self, name, settings):
        import wandb

        self.run = wandb.init(project="tagi_ddp", name=name, config=dict(settings))

    def log(self, metrics, step):
        self.run.log(metrics, step=step)

    def finish(self, failed):
        self.run.finish(exit_code=int(failed))


class Predict(Task):
    """Predict how diabetes goes on."""

    def run_model(self, model, batch, state):
        return model(batch[0])

    def compute_loss(self, model, batch, state, output):
        return GaussianLoss(model, output, batch[1], NOISE)


def main():
    tracker = {"mlflow": MLflow, "wandb": Wandb}[sys.argv[1]]()
    x, y = load_diabetes(return_X_y=True)
    x, y = scale(x).astype("float32"), scale(y).astype("float32")[:, None]
    pytagi.manual_seed(0)
    network = Sequential(Linear(x.shape[1], 32), ReLU(), Linear(32, 1))
    with ParallelMixin({"name": "diabetes", "exp_dir": "runs"}) as trainer:
        held_out = x[:100], y[:100]
        data = x[100:], y[100:]
        settings = {"epochs": 5, "batch_size": 20, "held_out": held_out, "trackers": [tracker]}
        losses = trainer.train(Predict(), network, data, **settings)
        if trainer.rank == 0:
            print(f"negative log-likelihood {losses[0]:.3f}, then {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
