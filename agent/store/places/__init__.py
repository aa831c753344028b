"""Where files of a store lie: a disk, a bucket, a folder."""
