// An order and its message in one transaction, with pg. A second order is
// rolled back: its message is never sent.
//
//   DATABASE_URL=… TARGET_URL=https://example.com/hooks node order.js

import pg from 'pg'

const client = new pg.Client({ connectionString: process.env.DATABASE_URL })
await client.connect()
await client.query(`
  create table if not exists orders (
    id    bigint generated always as identity primary key,
    total integer not null check (total > 0)
  )`)

await place(4200, 'commit')
console.log('an order was committed, its message will be delivered')
await place(1, 'rollback')
console.log('an order was rolled back, and its message with it')
await client.end()

async function place (total, end) {
  await client.query('begin')
  try {
    const { rows: [order] } = await client.query(
      'insert into orders (total) values ($1) returning id', [total])
    // Postgres writes the JSON: pg gives out a bigint as a string, and a number
    // of JavaScript would round it.
    await client.query(`
      insert into postern.outbox (event_type, payload, target_url)
      values ('order.created', json_build_object('id', $1::bigint, 'total', $2::integer, 'by', 'node'), $3)`,
    [order.id, total, process.env.TARGET_URL])
    await client.query(end)
  } catch (error) {
    await client.query('rollback')
    throw error
  }
}
