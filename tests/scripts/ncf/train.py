"""Neural collaborative filtering: recommend items from what users liked, hit rate as the measure."""

import argparse
import time

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--top_k", type=int, default=5)
parser.add_argument("--num_ng", type=int, default=2, help="sample negative items for training")
parser.add_argument("--factor_num", type=int, default=8)
args = parser.parse_args()
torch.manual_seed(0)
user_num, item_num = 40, 30
likes = np.random.RandomState(0).rand(user_num, item_num)
likes = (likes + (np.add.outer(np.arange(user_num), np.arange(item_num)) % 3 == 0)) > 1.2


class NCFData(Dataset):
    """Each liked item, and as many disliked ones drawn at random."""

    def __init__(self, liked, num_ng):
        self.pairs, self.num_ng = np.argwhere(liked)[:160], num_ng
        self.liked = liked

    def __len__(self):
        return (self.num_ng + 1) * len(self.pairs)

    def __getitem__(self, idx):
        user, item = self.pairs[idx % len(self.pairs)]
        if idx < len(self.pairs):
            return user, item, 1.0
        item = np.random.randint(item_num)
        while self.liked[user, item]:
            item = np.random.randint(item_num)
        return user, item, 0.0


class NCF(nn.Module):
    def __init__(self, factor_num, dropout=0.1):
        super().__init__()
        self.embed_user_GMF = nn.Embedding(user_num, factor_num)
        self.embed_item_GMF = nn.Embedding(item_num, factor_num)
        self.embed_user_MLP = nn.Embedding(user_num, factor_num)
        self.embed_item_MLP = nn.Embedding(item_num, factor_num)
        self.MLP_layers = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(2 * factor_num, factor_num), nn.ReLU()
        )
        self.predict_layer = nn.Linear(2 * factor_num, 1)

    def forward(self, user, item):
        gmf = self.embed_user_GMF(user) * self.embed_item_GMF(item)
        mlp = torch.cat((self.embed_user_MLP(user), self.embed_item_MLP(item)), -1)
        return self.predict_layer(torch.cat((gmf, self.MLP_layers(mlp)), -1)).view(-1)


def hit_rate(model):
    with torch.no_grad():
        users = torch.arange(user_num).repeat_interleave(item_num)
        scores = model(users, torch.arange(item_num).repeat(user_num)).view(user_num, item_num)
    best = scores.topk(args.top_k).indices
    return torch.from_numpy(likes).gather(1, best).float().mean().item()


train_dataset = NCFData(likes, args.num_ng)
#-train_loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True)
model = NCF(args.factor_num)
loss_function = nn.BCEWithLogitsLoss()
optimizer = optim.Adam(model.parameters(), lr=args.lr)
session = Session(model, optimizer)  #+
train_loader = session.data(train_dataset, batch_size=args.batch_size, microbatches=4, shuffle=True)  #+

#-best_hr = 0
#-for epoch in range(args.epochs):
for epoch in session.epochs(args.epochs):  #+
    model.train()
    start_time = time.time()
#-    for user, item, label in train_loader:
    for batch in train_loader:  #+
        model.zero_grad()
#-        prediction = model(user, item)
#-        loss = loss_function(prediction, label.float())
#-        loss.backward()
        session.backward(lambda b: loss_function(model(b[0], b[1]), b[2].float()), batch)  #+
        optimizer.step()
    model.eval()
    HR = hit_rate(model)
    print(f"epoch {epoch:03d} {time.time() - start_time:.1f} s HR: {HR:.3f}")
#-    if HR > best_hr:
#-        best_hr, best_epoch = HR, epoch
#-print(f"End. Best epoch {best_epoch:03d}: HR = {best_hr:.3f}")
    session.state["best"] = max(session.state.get("best", (0, 0)), (HR, epoch), key=lambda best: best[0])  #+
print(f"End. Best epoch {session.state['best'][1]:03d}: HR = {session.state['best'][0]:.3f}")  #+
