import React from 'react';
import { createRoot } from 'react-dom/client';
import { ThemeContext, createTheme, toDataFrame, FieldType, getDisplayProcessor, dateTime } from '@grafana/data';
import { GlobalStyles, PanelChrome, TimeSeries, BigValue } from '@grafana/ui';

const theme = createTheme({ colors: { mode: 'dark' } });
const { board, results, range } = window.DATA;
const WIDTH = 1280, CELL = 26, GAP = 6;

function fieldOf(values, name, labels, defaults, index) {
  const field = { name: 'Value', type: FieldType.number, values, labels,
    config: { ...defaults, displayName: name, color: { mode: 'palette-classic' },
      custom: { drawStyle: 'line', lineWidth: 1, fillOpacity: 8, showPoints: 'never', axisPlacement: 'auto', scaleDistribution: { type: 'linear' } } },
    state: { seriesIndex: index } };
  return field;
}
function framesOf(panel) {
  let index = 0;
  const frames = [];
  for (const series of results[panel.id] ?? []) {
    const time = { name: 'Time', type: FieldType.time, values: series.times, config: {} };
    const value = fieldOf(series.values, series.name, series.labels, panel.fieldConfig.defaults, index++);
    const frame = toDataFrame({ refId: series.refId + index, name: series.name, fields: [time, value] });
    for (const field of frame.fields) field.display = getDisplayProcessor({ field, theme });
    frame.fields[1].state = { seriesIndex: index - 1, displayName: series.name };
    frames.push(frame);
  }
  return frames;
}
function Numbers({ panel, width, height }) {
  const rows = results[panel.id] ?? [];
  const each = Math.max(1, rows.length);
  return <div style={{ display: 'flex' }}>{rows.map((row) => {
    const field = fieldOf([row.values.at(-1)], row.name, row.labels, panel.fieldConfig.defaults, 0);
    const shown = getDisplayProcessor({ field: { ...field, config: field.config }, theme })(row.values.at(-1));
    return <BigValue key={row.name} theme={theme} width={width / each} height={height} value={{ ...shown, title: row.name }} colorMode="value" graphMode="none" justifyMode="auto" textMode="value_and_name" />;
  })}</div>;
}
function TableOf({ panel }) {
  const rows = (results[panel.id] ?? []).slice(0, 8);
  return <table style={{ fontSize: 12, margin: 6, color: theme.colors.text.primary }}><tbody>{rows.map((row) =>
    <tr key={row.name}><td style={{ paddingRight: 20 }}>{row.name}</td><td>{Object.entries(row.labels).filter(([k]) => k !== '__name__').map(([k, v]) => `${k}=${String(v).slice(0, 24)}`).join('  ')}</td><td style={{ paddingLeft: 20 }}>{row.values.at(-1)}</td></tr>)}</tbody></table>;
}
const timeRange = { from: dateTime(range.from), to: dateTime(range.to), raw: { from: dateTime(range.from), to: dateTime(range.to) } };
function Body({ panel, width, height }) {
  const frames = framesOf(panel);
  if (!frames.length) return <div style={{ padding: 20, color: theme.colors.text.secondary }}>No data</div>;
  if (panel.type === 'stat') return <Numbers panel={panel} width={width} height={height} />;
  if (panel.type === 'table') return <TableOf panel={panel} />;
  return <TimeSeries frames={frames} structureRev={1} timeRange={timeRange} timeZone="utc" width={width} height={height} legend={{ displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [] }} />;
}
function Board() {
  const unit = WIDTH / 24;
  const bottom = Math.max(...board.panels.map((p) => p.gridPos.y + p.gridPos.h));
  return <div style={{ position: 'relative', width: WIDTH + 20, height: bottom * CELL + 60, background: theme.colors.background.canvas, padding: 10, fontFamily: theme.typography.fontFamily }}>
    <div style={{ color: theme.colors.text.primary, fontSize: 20, padding: '4px 8px 12px' }}>{board.title}</div>
    {board.panels.map((p) => {
      const at = { position: 'absolute', left: 10 + p.gridPos.x * unit, top: 50 + p.gridPos.y * CELL, width: p.gridPos.w * unit - GAP, height: p.gridPos.h * CELL - GAP };
      if (p.type === 'row') return <div key={p.id} style={{ ...at, color: theme.colors.text.primary, fontSize: 15, paddingLeft: 6 }}>{p.title}</div>;
      return <div key={p.id} style={at}><PanelChrome title={p.title} description={p.description} width={at.width} height={at.height} padding="none">{(w, h) => <Body panel={p} width={w} height={h} />}</PanelChrome></div>;
    })}
  </div>;
}
createRoot(document.getElementById('root')).render(<ThemeContext.Provider value={theme}><GlobalStyles /><Board /></ThemeContext.Provider>);
document.body.style.margin = '0';
