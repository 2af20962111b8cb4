package main

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"postern/outbox/signature"
)

// River is a general job queue, newest version, with a worker that posts, tuned
// for throughput: as many workers as the others have slots, fetching again
// after 1 ms.
var riverQueue = contender{
	name: "River",
	schema: func(ctx context.Context, _ *bench, db *database) error {
		migrator, err := rivermigrate.New(riverpgxv5.New(db.pool), nil)
		if err != nil {
			return err
		}
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
		return err
	},
	load: loadRiver,
	insert: func(_ context.Context, db *database) (inserter, error) {
		client, err := river.NewClient(riverpgxv5.New(db.pool), &river.Config{})
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context, id, url, body string) error {
			_, err := client.Insert(ctx, webhook{id, url, body}, nil)
			return err
		}, nil
	},
	left: "select count(*) from river_job where state <> 'completed'",
	command: func(ctx context.Context, _ *bench, db *database, w work) *exec.Cmd {
		return role(ctx, "river", riverSettings{db.url, w.Slots})
	},
}

type webhook struct {
	ID   string `json:"id"`
	URL  string `json:"url"`
	Body string `json:"body"`
}

// Kind names the job.
func (webhook) Kind() string { return "webhook" }

func loadRiver(ctx context.Context, b *bench, db *database, w work) error {
	client, err := river.NewClient(riverpgxv5.New(db.pool), &river.Config{})
	if err != nil {
		return err
	}
	content := body(w.Payload)
	batch := max(1, min(5000, 64<<20/w.Payload))
	for first := 1; first <= w.N; first += batch {
		var jobs []river.InsertManyParams
		for i := first; i < first+batch && i <= w.N; i++ {
			jobs = append(jobs, river.InsertManyParams{Args: webhook{"m" + strconv.Itoa(i), b.sink.url(i%w.Destinations, "ok"), content}})
		}
		if _, err := client.InsertManyFast(ctx, jobs); err != nil {
			return err
		}
	}
	return nil
}

type riverSettings struct {
	URL   string
	Slots int
}

type webhookWorker struct {
	river.WorkerDefaults[webhook]
	poster  *poster
	secrets []signature.Secret
}

// Work posts the webhook.
func (w *webhookWorker) Work(ctx context.Context, job *river.Job[webhook]) error {
	return w.poster.post(ctx, job.Args.URL, job.Args.ID, []byte(job.Args.Body), w.secrets)
}

func runRiver(s riverSettings) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	key, err := signature.ParseSecret(secret)
	if err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(s.URL)
	if err != nil {
		return err
	}
	config.MaxConns = 10
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	workers := river.NewWorkers()
	river.AddWorker(workers, &webhookWorker{poster: newPoster(s.Slots), secrets: []signature.Secret{key}})
	client, err := river.NewClient[pgx.Tx](riverpgxv5.New(pool), &river.Config{
		FetchCooldown: time.Millisecond,
		Logger:        slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
		Queues:        map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: s.Slots}},
		Workers:       workers,
	})
	if err != nil {
		return err
	}
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	<-ctx.Done()
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	return client.StopAndCancel(ending)
}
