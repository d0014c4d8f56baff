"""Embedding bags: rows of a table looked up and pooled, their gradients by row, and updates of the touched rows."""

from scalejax.kernels.embedding_bag.api import RowPlan as RowPlan
from scalejax.kernels.embedding_bag.api import embedding_bag as embedding_bag
from scalejax.kernels.embedding_bag.api import gather_and_pool_rows as gather_and_pool_rows
from scalejax.kernels.embedding_bag.api import gather_rows as gather_rows
from scalejax.kernels.embedding_bag.api import plan_rows as plan_rows
from scalejax.kernels.embedding_bag.api import pool_rows as pool_rows
from scalejax.kernels.embedding_bag.api import slot_bags as slot_bags
from scalejax.kernels.embedding_bag.api import sum_by_row as sum_by_row
from scalejax.kernels.embedding_bag.api import update_rows as update_rows
from scalejax.kernels.embedding_bag.host_row_plan import plan_rows_host as plan_rows_host
from scalejax.kernels.embedding_bag.host_row_plan import plan_tables_host as plan_tables_host
from scalejax.kernels.embedding_bag.packing import pack_rows as pack_rows
from scalejax.kernels.embedding_bag.packing import unpack_rows as unpack_rows
