"""A model for one device, cut into stages that train it together with the same numbers.

returned  a loss, and the numbers beside it              (returned.py)
loss      a script's loss function, recorded             (loss.py)
closure   what it closes over                            (closure.py)
record    the model and its loss, as one graph           (record.py)
examine   what every position of the graph would send    (examine.py)
cut       stages that own only their parameters          (cut.py)
stage     forward and backward of one stage              (stage.py)
execute   a schedule, interpreted with tensors           (execute.py)
channel   tensors from worker to worker                  (channel.py)
reduce    one stage's sums, over its replicas            (reduce.py)
births    initial values, made only where they are owned (births.py)
"""
