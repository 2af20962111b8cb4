"""An order and its message in one transaction, with psycopg 3.

A second order is rolled back: its message is never sent.

    DATABASE_URL=… TARGET_URL=https://example.com/hooks python3 order.py
"""

import json
import os

import psycopg


def place(connection, total):
    """Writes the order and its message into the transaction that is open."""
    (order_id,) = connection.execute(
        "insert into orders (total) values (%s) returning id", (total,)
    ).fetchone()
    connection.execute(
        "insert into postern.outbox (event_type, payload, target_url) values (%s, %s, %s)",
        (
            "order.created",
            json.dumps({"id": order_id, "total": total, "by": "python"}),
            os.environ["TARGET_URL"],
        ),
    )


with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
    connection.execute(
        """create table if not exists orders (
             id    bigint generated always as identity primary key,
             total integer not null check (total > 0)
           )"""
    )

    with connection.transaction():
        place(connection, 4200)
    print("an order was committed, its message will be delivered")

    with connection.transaction():
        place(connection, 1)
        raise psycopg.Rollback
    print("an order was rolled back, and its message with it")
