// Package slots decides which destinations may have the process's request
// slots.
//
// It keeps a queue of the destinations that are believed to have deliveries
// due. [Pool.Choose] takes those whose turn it is and says how many rows a claim
// may bring for each; [Pool.Take] turns the rows that came into holders. A
// holder acquires a slot before its request and releases it afterwards:
//
//	Mark → Choose → (claim) → Take → Acquire → (request) → Release
//
// Three rules keep destinations from starving each other:
//
//   - A destination that answers quickly may hold all but an eighth of the slots.
//   - One that is slow, or has not answered yet, may hold a quarter; all of those
//     together may hold three quarters.
//   - An eighth is kept for single requests to destinations never heard from.
//
// All it knows is a guess that the next claim corrects: a wrong one costs a
// query. The package knows neither the database nor HTTP.
package slots
