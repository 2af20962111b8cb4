package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"postern/integration/harness/pgtest/cluster"
)

// database is where the demonstration lives: a server of its own, or two
// schemas of its own in the database of DATABASE_URL.
type database struct {
	url     string
	outbox  string           // the schema of Postern
	shop    string           // the schema of the shop
	cluster *cluster.Cluster // nil: the server is not ours
	pool    *pgxpool.Pool
	dir     string // for files; goes with the rest
}

func openDatabase(ctx context.Context, given string) (_ *database, err error) {
	db := &database{url: given, outbox: "postern", shop: "shop"}
	if given == "" {
		if db.cluster, err = cluster.Start(ctx, nil); err != nil {
			return nil, err
		}
		// Its directory goes even when we are killed.
		db.url, db.dir = db.cluster.URL("postgres"), db.cluster.Dir()
	} else {
		own := "postern_demo_" + strings.ToLower(rand.Text()[:8])
		db.outbox, db.shop = own, own+"_shop"
		if db.dir, err = os.MkdirTemp("", "postern-demo-"); err != nil {
			return nil, err
		}
	}
	if err := db.connect(ctx); err != nil {
		return nil, errors.Join(err, db.close())
	}
	return db, nil
}

func (db *database) connect(ctx context.Context) error {
	config, err := pgxpool.ParseConfig(db.url)
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	config.ConnConfig.RuntimeParams["application_name"] = "postern demo"
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return fmt.Errorf("connect: %w", err)
	}
	db.pool = pool // from here on there may be something to drop
	if _, err := db.pool.Exec(ctx, db.in(`
create schema shop;
create table shop.orders (
  id         bigint generated always as identity primary key,
  what       text not null,
  created_at timestamptz not null default now()
)`)); err != nil {
		return fmt.Errorf("create the shop: %w", err)
	}
	return nil
}

// in writes the names of the two schemas into a statement.
func (db *database) in(sql string) string {
	return strings.NewReplacer(
		"postern.", db.outbox+".",
		"schema shop", "schema "+db.shop,
		"shop.", db.shop+".",
	).Replace(sql)
}

// psql is how somebody looks into the database.
func (db *database) psql() string {
	if db.cluster == nil {
		return `psql "$DATABASE_URL"`
	}
	return fmt.Sprintf("%s '%s'", db.cluster.Binaries().Path("psql"), db.url)
}

// errLeft says that something could not be removed.
var errLeft = errors.New("something is left behind")

// close removes all that the demonstration has written.
func (db *database) close() error {
	var err error
	switch {
	case db.cluster != nil:
		err = db.cluster.Close()
	case db.pool != nil:
		err = db.dropSchemas()
	}
	if db.pool != nil {
		db.pool.Close()
	}
	if err = errors.Join(err, os.RemoveAll(db.dir)); err != nil {
		return fmt.Errorf("%w: %w", errLeft, err)
	}
	return nil
}

func (db *database) dropSchemas() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for _, schema := range []string{db.shop, db.outbox} {
		if _, err := db.pool.Exec(ctx, "drop schema if exists "+schema+" cascade"); err != nil {
			return fmt.Errorf("drop schema %s: %w", schema, err)
		}
	}
	return nil
}
