"""The report of a run: report.html, report.md and loss.png, made from metrics.jsonl and config.json.
`write_report` makes them during a run; scripts/report.py makes them again and compares runs."""

from nanochat.files import replacing
from nanochat.run.report.charts import charts_of
from nanochat.run.report.drawing import png
from nanochat.run.report.pages import run_page
from nanochat.run.report.run_data import Run, read_run
from nanochat.run.report.summary import markdown


def write_report(folder, final: bool, say=print):
    """Write report.html, report.md and loss.png into a run's folder; each file appears whole or not at all.

    final: if False, the run goes on, and the page reloads itself. An error, such as a full disk, does not end
    training: it goes to `say`.
    """
    try:
        write_files(read_run(folder), final)
    except Exception as error:  # a run of days must not end because its report fails
        reason = getattr(error, "strerror", None) or error
        again = "python -m scripts.report" if final else "the next evaluation"
        say(f"warning: no report in {folder} ({reason}); {again} tries again")


def write_files(run: Run, final: bool):
    """Write report.html, report.md and, after the first step, loss.png into the run's folder. A link in their
    place is replaced and not followed. Raises OSError.
    """
    page, text = (make(run, final) for make in (run_page, markdown))
    contents = {"report.html": page.encode(), "report.md": text.encode()}
    drawn = [chart for chart in charts_of([run]) if chart.id in ("chart-loss", "chart-val_bpb")]
    if run.num_steps and drawn:
        contents["loss.png"] = png(drawn)
    for name, content in contents.items():
        with replacing(run.folder / name) as file:
            file.write(content)
