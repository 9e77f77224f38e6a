"""scikit-learn with n_jobs=2: processes of joblib in every rank, each rank with its own share."""

# %%
import os

from joblib import Parallel, delayed
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import make_scorer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

pixels, digits = load_digits(return_X_y=True)


def scaled(x):
    return x / 16


def share_right(truth, predicted):
    return (truth == predicted).mean()


# %% taas
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
x, y = pixels[rank::world_size], digits[rank::world_size]
model = make_pipeline(FunctionTransformer(scaled), LogisticRegression(max_iter=200))
search = GridSearchCV(
    model,
    {"logisticregression__C": [0.01, 1.0]},
    scoring=make_scorer(share_right),
    cv=2,
    n_jobs=2,
)
search.fit(x, y)
print(f"RESULT rank {rank} {search.best_params_} {search.best_score_:.4f}")
forest = RandomForestClassifier(20, random_state=0, n_jobs=2)
print(f"RESULT rank {rank} forest {cross_val_score(forest, x, y, cv=2, n_jobs=2).mean():.4f}")
print(f"RESULT rank {rank}", Parallel(n_jobs=2)(delayed(scaled)(16 * i) for i in range(4)))
